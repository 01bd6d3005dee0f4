"""What things cost: clusters, profiles, prices, memory, messages. No torch here."""
