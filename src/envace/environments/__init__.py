"""Real, executable tool worlds. Training by rehearsal never imports one."""
