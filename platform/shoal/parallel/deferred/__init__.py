"""Models that are built without memory for their parameters, which are drawn later, part by part."""
