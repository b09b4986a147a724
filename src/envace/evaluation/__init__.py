"""Measuring a policy outside training: success in real worlds, and how true its rehearsed responses are."""
