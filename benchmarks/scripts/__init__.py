"""Other people's training scripts, run as they are and with zshard."""
