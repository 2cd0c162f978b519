"""Films of policies: episodes as animations, with what the policy thought of each step drawn beneath."""
