"""What strawq's own tests are made of, shipped so that users can test their code against the same worlds."""
