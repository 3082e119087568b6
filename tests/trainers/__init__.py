"""Scripts that run the code of trainers that are not installed here."""
