"""Operations: their meaning and checks in ``api``, their definition in ``reference``, fast backends beside
them."""
