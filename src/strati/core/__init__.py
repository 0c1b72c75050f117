"""Foundations without numerics: errors, options, result types, tables, text, random streams, plug-ins."""
