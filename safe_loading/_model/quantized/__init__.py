"""Questions about quantized layers and configs that are asked of every format: recognized, sized, decoded, traced."""
