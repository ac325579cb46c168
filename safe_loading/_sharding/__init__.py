"""Models whose weights are spread over ranks: which part a rank owns, and how its bytes get there."""
