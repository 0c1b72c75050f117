"""Where and how long work runs: files, progress, the store of finished units, the engines that run them."""
