"""robust-and-critical-layers: what data-free metrics are worth when a layer is replaced."""
