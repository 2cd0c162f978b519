"""What verbs share: lookup of jobs, consoles, input readers."""
