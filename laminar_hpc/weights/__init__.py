"""Weight images, and their way from the trainers along the relays to the rollouts."""
