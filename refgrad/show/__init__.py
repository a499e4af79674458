"""How does a model look: as text, as a picture, explained."""
