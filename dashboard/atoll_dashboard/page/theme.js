"use strict";
// Not a module, so that it runs before the first paint, and the wrong theme never flashes.
(() => {
  const KEY = "atoll-theme";
  const known = (theme) => (theme === "light" || theme === "dark" ? theme : "automatic");
  const read = () => {
    try {
      return known(localStorage.getItem(KEY));
    } catch {
      return "automatic"; // without storage, the choice is lost when the page is closed
    }
  };
  let chosen = read();
  window.atollTheme = {
    get: () => chosen,
    set(theme) {
      chosen = known(theme);
      document.documentElement.dataset.theme = chosen;
      try {
        localStorage.setItem(KEY, chosen);
      } catch {
        // as in read()
      }
    },
  };
  document.documentElement.dataset.theme = chosen;
})();
