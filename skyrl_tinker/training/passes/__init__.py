"""Forward and backward passes of one batch, with a loss per request and recovery from exhausted memory."""
