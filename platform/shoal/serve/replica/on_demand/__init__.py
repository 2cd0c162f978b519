"""Models of which a replica has some: requests for another wait, or go to the replica that has it."""
