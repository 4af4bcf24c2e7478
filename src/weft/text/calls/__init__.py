"""Tool calls in a model's text: a reader for each syntax, and the forms that make models write
them."""
