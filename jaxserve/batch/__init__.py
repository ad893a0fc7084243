"""OpenAI's batch files: lines of requests in, lines of answers out, resumable at any moment."""
