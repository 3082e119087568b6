"""Where a token stands: in its document, in the tables that models embed, and in RoPE that knows the length."""
