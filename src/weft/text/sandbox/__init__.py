"""Worker processes for untrusted texts and tokenizers: they have limits, and can be killed."""
