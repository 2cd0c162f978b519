"""R2D2: recurrent Q-learning from replayed sequences, with stored state and burn-in (Kapturowski et al., ICLR 2019)."""
