"""Learning coefficient and compressibility (Urdshals et al. 2025)."""
