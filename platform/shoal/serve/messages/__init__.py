"""Values that the parts of serving exchange: requests, desired state, reports."""
