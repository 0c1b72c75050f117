"""What is studied: specs, data, networks and where they come from, initial values, training."""
