"""Other people's training scripts, run with the libraries that they were written for and with zshard."""
