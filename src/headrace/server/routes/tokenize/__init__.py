"""`/tokenize` and `/detokenize`: text and messages to ids, and back."""
