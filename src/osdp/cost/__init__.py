"""What a choice costs, in bytes and in seconds. No torch and no solver in here."""
