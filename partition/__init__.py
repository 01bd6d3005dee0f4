"""Who holds what: plans, the search for them, and bounds on how good they can be. No torch here."""
