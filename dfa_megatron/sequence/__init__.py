"""Small functions of a sequence that is sharded across ranks."""
