"""What a reader can look at: causal attention, a leaking mask, two runs that drift apart."""
