"""Several runs side by side: a table and a plot."""
