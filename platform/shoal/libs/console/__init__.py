"""A console in the browser: runs, models, endpoints and the cluster, seen and operated."""
