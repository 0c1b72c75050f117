"""Running a network on data: batches of any kind of data, calling any kind of model, forward hooks."""
