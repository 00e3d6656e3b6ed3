"""The decoder (Qwen3 and Llama layouts) and the reading and writing of its weights."""
