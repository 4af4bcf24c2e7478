"""Forms of structured outputs (schemas, regular expressions, grammars), and their compilation."""
