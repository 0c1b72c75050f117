"""The page, a pure function of JSON results, and matplotlib figures of results (``plots``)."""
