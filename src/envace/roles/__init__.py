"""The two roles of the policy. Acting needs no prompt of ours: it is the task's own conversation. Rehearsing does."""
