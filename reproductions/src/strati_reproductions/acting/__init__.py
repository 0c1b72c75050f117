"""Acting on measurements, held to account: plans against the even spread, and what others claim, on real networks."""
