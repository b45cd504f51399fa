"""The engine: requests in, tokens out, experts fetched in between. Knows no HTTP and no Ray."""
