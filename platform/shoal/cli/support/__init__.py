"""Code that commands share: lookup of jobs, consoles, input readers."""
