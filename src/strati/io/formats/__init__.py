"""One module per file format. Each has ``contents(source)``: the header checked, the weights left where they are."""
