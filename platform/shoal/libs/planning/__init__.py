"""Which plan is fastest for a Task on given hardware: enumerated, predicted, ranked. Called by `shoal plan`."""
