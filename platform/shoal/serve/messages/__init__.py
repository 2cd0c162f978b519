"""Values that the rooms of serving exchange: requests, desired state, reports."""
