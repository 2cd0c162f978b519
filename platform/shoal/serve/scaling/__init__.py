"""How many replicas an endpoint has: the policy, and its replay on a trace. The Ray shell is `on_ray.autoscaling`."""
