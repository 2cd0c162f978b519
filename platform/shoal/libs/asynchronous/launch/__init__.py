"""The processes of a run of replicas: started, placed, replaced and ended."""
