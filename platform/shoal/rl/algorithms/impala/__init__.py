"""IMPALA (1802.01561): configuration, loss and update."""
