"""What is measured on sample image+text prompts before a graph is exported."""
