"""Networks side by side: which layers correspond, how far each moved, what a training run did."""
