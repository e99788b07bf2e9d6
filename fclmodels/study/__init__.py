"""A study: methods side by side, each with the settings that val rows choose, over draws of stream and partition."""
