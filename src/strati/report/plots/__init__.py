"""Pictures of results with matplotlib, one module per topic; imported by a result's ``plot()`` inside the call."""
