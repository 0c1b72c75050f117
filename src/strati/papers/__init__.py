"""Each paper's tables and figures, the paper's number beside ours; and the real networks they run on."""
