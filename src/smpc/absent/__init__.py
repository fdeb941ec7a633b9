"""What a script holds of a model whose values other ranks have: errors in place of wrong numbers."""
