"use strict";
// Not a module: it runs before the first paint, so that nothing flashes in the other theme.
(() => {
  const KEY = "atoll-theme";
  const known = (theme) => (theme === "light" || theme === "dark" ? theme : "automatic");
  const read = () => {
    try {
      return known(localStorage.getItem(KEY));
    } catch {
      return "automatic"; // storage is forbidden: the choice lasts as long as the page
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
        // as above
      }
    },
  };
  document.documentElement.dataset.theme = chosen;
})();
